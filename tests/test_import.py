"""`import eqquant` replaces no attribute and no setting of others, and adds Quax rules only for our arrays."""

import subprocess
import sys


PACKAGES = "jax jaxlib equinox quax jaxtyping optax numpy plum beartype rich typing_extensions wadler_lindig".split()

SETUP = f"""
import sys, types, warnings
import {", ".join(PACKAGES)}
import jax.numpy, jax.core, jax.extend.core, jax.experimental.pallas, jax.custom_derivatives

PACKAGES = {PACKAGES!r}
# Attributes that Python and libraries fill lazily.
CACHES = ("__annotations_cache__", "__doc__", "__pdoc__", "_abc_impl", "__warningregistry__", "__dataclass_fields__")

def owner(name):
    return name.partition(".")[0]

def snapshot():
    found = {{}}
    for name, module in list(sys.modules.items()):
        if module is None or owner(name) not in PACKAGES:
            continue
        holders = [(name, module)]
        holders += [(f"{{name}}.{{key}}", x) for key, x in vars(module).items() if isinstance(x, type)]
        for path, holder in holders:
            if owner(getattr(holder, "__module__", name) or name) in PACKAGES:
                for key, x in vars(holder).items():
                    if key not in CACHES and not isinstance(x, types.ModuleType):
                        found[path, key] = x
    return found

def settings():
    return {{**jax.config.values, "filters": list(warnings.filters)}}

before, before_settings = snapshot(), settings()
"""

CHANGES = """
quax.ArrayValue.added = 1
jax.numpy.sin = jax.numpy.cos
quax.register(jax.lax.erf_p)(lambda x: x)
warnings.simplefilter("ignore")
"""

CHECK = """
import eqquant
from eqquant._array.value import AbstractArrayValue
after = snapshot()
changed = [at for at, x in before.items() if at not in after or after[at] is not x]
holders = {path for path, _ in before}
changed += [at for at in after if at not in before and at[0] in holders]
if settings() != before_settings:
    changed.append("settings")
from quax._dispatch import _rules
for primitive, function in _rules.items():
    for method in function.methods:
        if owner(method.implementation.__module__) in PACKAGES:
            continue
        if not any(isinstance(t, type) and issubclass(t, AbstractArrayValue) for t in method.signature.types):
            changed.append((str(primitive), str(method.signature)))
print(changed)
"""


def find_changes(program):
    run = subprocess.run([sys.executable, "-c", "\n".join((SETUP, program, CHECK))], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_changes_nothing():
    assert find_changes("import eqquant") == "[]"


def test_the_check_sees_changes():
    found = find_changes(CHANGES)
    assert all(change in found for change in ("added", "'sin'", "erf", "settings")), found
