"""Stand-ins for packages that another engine imports and a part of it never calls: each name in them is an empty class."""

import importlib.abc
import importlib.machinery
import sys
import types


class _Empty(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


def _named(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots):
        self.roots = roots

    def find_spec(self, name, *_):
        if name.partition(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        made = types.ModuleType(spec.name)
        made.__getattr__ = _named
        made.__version__ = "0.0"
        return made

    def exec_module(self, module):
        pass


def stand_in(*roots):
    """Make `import root` and `import root.anything` succeed."""
    sys.meta_path.insert(0, _Finder(frozenset(roots)))
