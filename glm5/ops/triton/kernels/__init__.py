"""The kernels. Importing a module of this package imports Triton."""
