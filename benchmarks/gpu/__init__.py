"""One command for the minutes in which a CUDA machine is at hand: `python -m benchmarks.gpu`."""
