"""One module a command; each parses options, calls a stage and prints."""
