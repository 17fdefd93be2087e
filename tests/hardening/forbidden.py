"""Finds calls that could run code out of a file, or write outside a folder, in Python source."""

import ast

# Modules that run what they read
_MODULES = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "imp", "tarfile")
# By the end of the name they are called by
_CALLS = {
    "torch.load": "reads a pickle",
    "torch.jit.load": "reads a pickle",
    "torch.hub.load": "runs code from the network",
    "read_pickle": "reads a pickle",
    "yaml.load": "may build any object: safe_load",
    "yaml.load_all": "may build any object: safe_load_all",
    "yaml.unsafe_load": "may build any object: safe_load",
    "yaml.full_load": "may build any object: safe_load",
    "eval": "runs text",
    "exec": "runs text",
    "compile": "runs text",
    "__import__": "imports by text",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "extract": "may leave its folder",
    "extractall": "may leave its folder",
    "unpack_archive": "may leave its folder",
    "mktemp": "is a race",
}
_BUILTINS = ("eval", "exec", "compile", "__import__")  # other objects may have methods of these names


def forbidden(source):
    """What is wrong, as (line, why)."""
    found = []
    names = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {
                (a.asname or a.name.split(".")[0]): (a.name if a.asname else a.name.split(".")[0]) for a in node.names
            }
            found += [(node.lineno, f"import {a.name}") for a in node.names if a.name.split(".")[0] in _MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
            if node.module.split(".")[0] in _MODULES:
                found.append((node.lineno, f"from {node.module} import"))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            found += [(node.lineno, why) for why in _faults(node, _name(node.func, names))]
        elif isinstance(node, ast.keyword) and node.arg == "allow_all_kernels":
            found.append((node.value.lineno, "kernels from the network"))
    return sorted(found)


def _faults(call, name):
    given = {k.arg: k.value for k in call.keywords}
    last = name.split(".")[-1]
    for bad, why in _CALLS.items():
        if name == bad or (bad not in _BUILTINS and name.endswith(f".{bad}")):
            yield f"{name} {why}"
    if name in ("numpy.load", "np.load") and not _is(given.get("allow_pickle"), False):
        yield f"{name} without allow_pickle=False"
    if "shell" in given and not _is(given["shell"], False):
        yield f"{name} with a shell"
    if _is(given.get("trust_remote_code"), True):
        yield f"{name} trusts remote code unasked"
    if last == "from_pretrained" and name != "from_pretrained":
        auto = name.split(".")[-2].startswith("Auto")
        if not _is(given.get("local_files_only"), True):
            yield f"{name} may fetch"
        if auto and "trust_remote_code" not in given:
            yield f"{name} may ask to run remote code"
        if not auto and not _is(given.get("use_safetensors"), True):
            yield f"{name} may read a pickle"


def _is(node, value):
    return isinstance(node, ast.Constant) and node.value is value


def _name(node, names):
    """The dotted name that is called, by what it was imported as."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value, names)}.{node.attr}"
    return ""
