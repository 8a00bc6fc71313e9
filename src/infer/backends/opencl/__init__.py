"""OpenCL: kernels in C; tensors are torch's on the CPU, and have memory of the device."""
