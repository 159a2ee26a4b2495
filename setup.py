from setuptools import setup

# kernels/ and autotune/ stand at the root and are also symlinked into hetconv/: the map below puts them into a wheel as
# subpackages, the symlinks let Python, mypy and pytest find them in a checkout where nothing is installed.
setup(
    packages=["hetconv", "hetconv.calls", "hetconv.following", "hetconv.ops", "hetconv.kernels", "hetconv.autotune"],
    package_dir={"hetconv.kernels": "kernels", "hetconv.autotune": "autotune"},
    package_data={"hetconv": ["devices.json", "py.typed"]},
)
