"""A kernel plugin in its own package: `kernels` computes, `plugin` registers the kernels, `bench` measures them."""
