"""The model that is tuned or planned, and its inputs, as the command line names them."""
