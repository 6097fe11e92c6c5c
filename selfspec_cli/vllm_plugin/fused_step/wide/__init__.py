"""The same for 9 to 64 tokens (memory.cu explains it); ../launch.py compiles and launches it, too."""
