"""Split models in the training loops of other libraries, a module for each library.

Each module imports its library, and nothing else of hetconv imports the module.
"""
