"""Checks and builds of the checkout: pages, C warnings, sdist and wheel."""
