"""Types shared by all subpackages of the engine. Imports no other subpackage, and no torch at import time."""
