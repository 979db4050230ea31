import { element } from "./dom.js";
import { labelOfRun } from "./names.js";

// Cards that show only one of two compared runs. All other cards show both.
const OF_ONE_RUN = ["histogram", "map", "course", "what-if"];

// In a comparison, adds the name of the run to cards that show only one run.
export function nameShownRun(main, store) {
  const names = OF_ONE_RUN.map((id) => {
    const name = element("span", { class: "of-run", hidden: true });
    main.querySelector(`#${id}-title`).after(name);
    return name;
  });
  store.on(["runData", "compareData"], ({ runData, compareData }) => {
    for (const name of names) {
      name.hidden = !compareData;
      name.textContent = compareData ? `of ${labelOfRun(runData.run, compareData.run)}` : "";
      name.title = runData?.run ?? "";
    }
  });
}
