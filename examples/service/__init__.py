"""The parts of ``training_service.py``, one concept per file; none of them is part of pipert."""
