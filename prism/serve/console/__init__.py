"""Tables and lines that `prism-serve` prints."""
