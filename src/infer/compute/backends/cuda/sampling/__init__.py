"""The sampler on a GPU: kernels in Triton for each stage, and the code that launches them."""
