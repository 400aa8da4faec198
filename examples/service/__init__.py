"""The parts of ``training_service.py``, one concept a file; none of them is part of pipert."""
