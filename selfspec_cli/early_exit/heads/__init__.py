"""Kinds of exit heads, by the name that users write in `head=`.

Objects of class `base.HeadKind` in the modules here; other packages add theirs by entry points of the group
"selfspec.heads". Importable without torch. `head_module.py` makes a module of a kind and its tensors,
`head_spec.py` reads the short names, `artifact.py` the files, `fitting.py` fits.
"""

from selfspec_cli.early_exit.heads.base import HeadKind
from selfspec_cli.early_exit.registry import Registry

HEADS = Registry("head kind", HeadKind, "selfspec_cli.early_exit.heads", "selfspec.heads", first="lens")
