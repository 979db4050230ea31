"""The next batch on torch; see `batches.py`."""


def tapped(model, train_function, look):
    def train(data):
        look(data[0])
        return train_function(data)

    return train
