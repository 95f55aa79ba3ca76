"""Reports: one HTML file that says what a run or an experiment did, for any browser, offline."""
