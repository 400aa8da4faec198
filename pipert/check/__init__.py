"""Checks that pipert keeps its promises on this machine's devices: ``python -m pipert check``.

``command.py`` runs ``checks.py`` and prints what it finds; ``ways.py`` has the models.
"""
