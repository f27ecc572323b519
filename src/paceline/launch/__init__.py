"""Who starts whom?"""
