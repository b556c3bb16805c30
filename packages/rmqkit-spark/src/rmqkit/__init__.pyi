# In an editable installation, this file makes Pyright and mypy treat this folder as a part of the package `rmqkit`. The
# file `rmqkit/__init__.py` is only in the distribution rmqkit. No wheel has this file.
