"""Reports of runs and experiments, each a single HTML file that works offline in any browser."""
