"""Everything is in setup.cfg; this file lets tools that look for it find the project."""

from setuptools import setup

setup()
