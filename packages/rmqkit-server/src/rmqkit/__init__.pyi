# Pyright and mypy take this folder for a part of the package `rmqkit` because of this file, where rmqkit is installed
# editable: `rmqkit/__init__.py` is in the package rmqkit. No wheel has this file.
