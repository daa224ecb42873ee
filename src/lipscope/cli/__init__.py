"""The command line: parses, calls, prints. Heavy imports happen inside the commands."""
