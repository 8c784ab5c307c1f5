"""Commands for developers. A regular package: one that is installed under this name would hide a
folder without this file, wherever it is on the path."""
