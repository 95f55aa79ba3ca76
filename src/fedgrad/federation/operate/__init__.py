"""What those who run a federation use: commands, certificates, a federation on one machine."""
