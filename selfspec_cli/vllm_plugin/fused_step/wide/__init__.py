"""All decoder layers of a draft step of 9 to 64 tokens as one kernel, on 4-bit copies.

memory.cu explains the design. layout.py plans the work of blocks and lays out weights, launch.py has the kernel's
arguments; it is compiled and launched as the kernel for fewer tokens (../launch.py).
"""
