from setuptools import find_packages, setup

# kernels/ and autotune/ stand at the root and are also symlinked into hetconv/: the map
# below puts them into a wheel as subpackages, the symlinks let Python, mypy and pytest
# find them in a checkout where nothing is installed. A source distribution has no
# symlinks, so that packages are looked for where their files are.
AT_ROOT = ("autotune", "kernels")
OWN = find_packages(
    "hetconv", exclude=[f"{name}{rest}" for name in AT_ROOT for rest in ("", ".*")]
)
setup(
    packages=[
        "hetconv",
        *(f"hetconv.{name}" for name in OWN),
        *(f"hetconv.{name}" for name in AT_ROOT),
        *(f"hetconv.{root}.{name}" for root in AT_ROOT for name in find_packages(root)),
    ],
    package_dir={f"hetconv.{name}": name for name in AT_ROOT},
    package_data={
        "hetconv": ["py.typed"],
        "hetconv.autotune.report": ["templates/*"],
        "hetconv.schemas": ["devices.json"],
    },
)
