"""A stand-in for a CUDA card on a machine that has none: tensors that say they are on it, and CUDA's own calls.

It computes nothing faster and proves nothing about a card. It lets the code that is only for one run, and finds what a
card would refuse: operands on two devices, and waiting for the card while a graph is captured. For the command
`benchmarks.gpu` and for tests, never for the product.
"""
