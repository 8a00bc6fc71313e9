"""OpenCL: kernels in C. Tensors are torch's on the CPU, and have memory on the device."""
