"""`convolve doctor`: what works on this machine, and a self-test of a device."""
