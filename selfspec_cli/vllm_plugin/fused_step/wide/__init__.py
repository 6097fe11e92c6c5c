"""All decoder layers of a draft step of 9 to 64 tokens as one kernel, on 4-bit copies.

memory.cu explains the design. layout.py plans the work of blocks and lays out weights; the kernel is compiled and
launched as the one for fewer tokens (../launch.py)."""
