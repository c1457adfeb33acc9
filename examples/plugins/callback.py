"""A callback: it observes a run, here its validations. Run: python examples/plugins/callback.py"""

import convolve


class PrintAccuracy(convolve.Callback):
    def on_validation(self, record: convolve.ValidationRecord) -> None:
        print(f"epoch {record.epoch:g}: accuracy {record.accuracy:.1%}")


if __name__ == "__main__":
    convolve.train("digits", "lenet5", callbacks=[PrintAccuracy()], epochs=2, progress=False)
