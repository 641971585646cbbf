"""Conversion of arrays: decide what must be done (`planner`), do it (`executor`), for one array or many (`batch`)."""
