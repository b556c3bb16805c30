"""The seams to the operating system: files (`disk`), threads (`threads`), and the process (`process`).

The store, the tables of a broker and the client's offset file use the system only through these modules, always as
``disk.NAME(...)``. A call costs the same as a call of the function itself. Tests and simulators replace the functions
of a module with its ``replaced``.
"""
