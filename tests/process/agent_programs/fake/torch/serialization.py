def save(thing, path):
    with open(path, "w", encoding="utf-8") as file:
        file.write(repr(thing))
