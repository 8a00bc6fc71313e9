// Answer for a server that has a second model, which is the served one under another name.
(() => {
	const fetched = window.fetch;
	const model = (id, value, takes) => ({ id, object: "model", status: { value }, takes, memory_bytes: 1.4e9 });
	const data = [model("smollm2", "loaded", ["generate"]), model("two", "unloaded", ["generate"]), model("vectors", "unloaded", ["embed"])];
	window.fetch = async (path, options = {}) => {
		if (path === "/v1/models") return Response.json({ object: "list", data });
		if (path === "/props?model=two") return Response.json({ ...await (await fetched("/props")).json(), model: "two" });
		return fetched(path, options);
	};
	document.getElementById("model-choice").dispatchEvent(new Event("focus"));
	return true;
})()
