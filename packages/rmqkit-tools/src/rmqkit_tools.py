"""An empty module for pytest, which searches the top of a plugin's wheel for modules in which to rewrite asserts.

Without this module, pytest takes folders inside of `rmqkit` for such modules, and warns that `__main__` is imported
already.
"""
