from setuptools import find_packages, setup

# kernels/ and autotune/ stand at the root and are also symlinked into hetconv/: the map
# below puts them into a wheel as subpackages, the symlinks let Python, mypy and pytest
# find them in a checkout where nothing is installed.
setup(
    packages=["hetconv", *(f"hetconv.{name}" for name in find_packages("hetconv"))],
    package_dir={"hetconv.kernels": "kernels", "hetconv.autotune": "autotune"},
    package_data={
        "hetconv": ["py.typed"],
        "hetconv.autotune.report": ["templates/*"],
        "hetconv.schemas": ["devices.json"],
    },
)
