"""Kernels of generation: a plain PyTorch definition of each, and a Triton version (triton_*.py).

Those of training are in overland/kernels, which also decides where Triton runs.
"""
