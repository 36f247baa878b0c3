"""Runs first in the packed program: the programs that it starts get the library path of the user.

The loader has set its own, so that they would load our copies of the machine's libraries.
"""

import os

original = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
os.environ.pop("LD_LIBRARY_PATH", None)
if original is not None:
    os.environ["LD_LIBRARY_PATH"] = original
