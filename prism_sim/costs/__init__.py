"""Times of engine steps: one interface over tables from a grid, a roofline, or a calibration."""
