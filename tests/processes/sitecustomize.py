"""What every Python process that a test starts runs first (`tests/conftest.py` puts this folder on its path).

Importing vLLM makes some millions of objects that stay. With Python's usual threshold the garbage collector walks over
them time and again: a fifth of the import's processor time.
"""

import gc

gc.set_threshold(50_000)
