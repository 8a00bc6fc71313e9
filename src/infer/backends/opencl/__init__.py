"""OpenCL: kernels in C for devices that share the host's memory; tensors are torch's on the CPU."""
