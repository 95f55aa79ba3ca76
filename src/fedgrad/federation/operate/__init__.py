"""Tools for operators of a federation: commands, certificates, a federation on one machine."""
