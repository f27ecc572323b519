"""Public-style models, each trained by paceline on several nodes and processes and by a plain loop: are they equal?"""
