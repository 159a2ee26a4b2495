"""A split model in one program: its ranks are processes that the program starts."""
