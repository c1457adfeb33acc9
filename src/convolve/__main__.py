"""`python -m convolve` is the `convolve` command."""

from convolve.cli.main import main

main()
