"""Nothing to import. Pytest looks at the top of a plugin's wheel for the modules whose asserts it rewrites.

Without this one it takes folders inside of `rmqkit` for such modules, and warns that `__main__` is imported already.
"""
