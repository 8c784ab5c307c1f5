"""How long an engine's steps take: one interface, tables behind it (grid, roofline, calibrated)."""
