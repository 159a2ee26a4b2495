"""Host time of split models and of kernel calls."""
