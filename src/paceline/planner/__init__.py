"""How fast is it, honestly?"""
